"""``paceline plan``: predicts steps on more hosts from a recording."""
