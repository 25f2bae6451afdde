"""From a run's settings to Megatron's objects, and what is known of a model without training it."""
