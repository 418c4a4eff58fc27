"""``paceline bench``: measures torch and paceline on this machine, in one run."""
