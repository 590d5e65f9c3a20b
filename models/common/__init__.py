"""What all models share: layers, exchanges between devices, and the train step."""
