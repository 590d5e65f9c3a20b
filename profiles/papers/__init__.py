"""Published facts from papers: clusters, numbers, and findings about overlap."""
