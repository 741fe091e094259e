"""Updates of parameters from their gradients: rules, rates, the scale of the loss, and the division among ranks."""
