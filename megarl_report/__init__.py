"""report.html: one page about one run or several, from what they wrote into their folders."""
