"""The system: workers, policies, serving, launch. Imports no jax and no torch; engines are loaded by name in the worker's main."""
