"""The operations engines run on chips. Sub-modules import only their own framework."""
