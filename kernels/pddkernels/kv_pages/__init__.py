"""Writing new tokens into KV pages, and moving token ranges between pages and wire order."""
