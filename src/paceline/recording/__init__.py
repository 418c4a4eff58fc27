"""What each rank did when: kept in bounded memory, or in files that outlive the rank. Without torch."""
