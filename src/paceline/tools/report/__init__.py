"""``paceline report``: reads recordings, and says where the time of the steps went."""
