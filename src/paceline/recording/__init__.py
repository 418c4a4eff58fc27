"""Records when each rank did what, in bounded memory or in files that outlive the rank; without torch."""
