"""Rule-based scorers, custom reward functions and the manager that runs them."""
