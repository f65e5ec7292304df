"""Faults and traffic drawn from seeds, and whether every request came through: `pdd chaos`. See docs/chaos.md."""
