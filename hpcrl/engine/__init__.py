"""Forward, backward and optimizer steps over packed micro-batches."""
