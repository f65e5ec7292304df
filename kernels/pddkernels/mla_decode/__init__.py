"""Multi-head latent attention over paged KV, heads absorbed: every head attends to the same latents."""
