"""Text in, microbatches out: a Megatron indexed dataset per domain, mixed during training."""
