"""Several ranks: what they exchange in a step, and parameters that are spread over them."""
