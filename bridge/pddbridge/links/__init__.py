"""What moves frames."""
