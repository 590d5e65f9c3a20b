"""Times of collective matmuls by site and form."""
