"""What runs on the ranks of each role."""
