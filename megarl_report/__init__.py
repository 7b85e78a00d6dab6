"""report.html: one page about one or several runs, from their folders."""
