"""One process per worker: scheduler, pages, prefix cache, step loop, gRPC service. Any role, any engine."""
