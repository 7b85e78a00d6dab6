"""Extract final mathematical answers, verify them, or turn them into integers."""
