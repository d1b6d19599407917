"""vLLM rollout engines and the transfer of weights into them."""
