"""report.html of one or several runs."""
