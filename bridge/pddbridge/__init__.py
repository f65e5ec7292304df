"""What two engines must agree on. Imports numpy, ml_dtypes and grpc; never jax, never torch."""
