"""Extract final answers of mathematical problems, verify them, or turn them into integers."""
