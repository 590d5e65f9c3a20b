"""Facts from papers: the clusters that the authors used, and the numbers that they published."""
