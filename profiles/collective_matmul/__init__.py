"""What collective matmuls take, site by site and form by form."""
