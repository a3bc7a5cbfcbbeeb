"""Plans on their GPUs: memory, bindings, steps, and the processes of the ranks."""
