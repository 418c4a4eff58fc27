"""One backward pass: which gradients are ready, which bucket leaves when, and what comes back."""
