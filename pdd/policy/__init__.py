"""Decisions as pure functions of (snapshot, request, now). The live system and the simulator call the same ones."""
