"""Generated stubs, conversions to our dataclasses, channel and server helpers."""
