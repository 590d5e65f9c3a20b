"""What the papers published: clusters, numbers, and findings about overlap."""
