"""`pdd bench serve`: load against any OpenAI-compatible endpoint, with the flags and JSON keys of `vllm bench serve`."""
