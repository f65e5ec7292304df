"""Builders and harnesses that tests share."""
