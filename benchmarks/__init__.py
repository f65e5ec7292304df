"""Measurements that are no part of `pdd bench`: each says in its docstring how it is run."""
