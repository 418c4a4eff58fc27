"""``paceline run`` and ``paceline.launch``: start ranks with torch's elastic agent."""
