"""``pdd compile``: kernels and whole engine steps for chips that are not in this machine, compiled by child processes."""
