"""What numpy cannot do as fast: C++ compiled on first use where it runs."""
