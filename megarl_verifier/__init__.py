"""Extract and verify mathematical answers, or turn them into integers."""
