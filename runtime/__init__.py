"""What runs in the user's process: the decorator, pass registration, and agreement between hosts."""
