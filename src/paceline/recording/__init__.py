"""What each rank did when: kept in bounded memory, or in a file that outlives the rank."""
