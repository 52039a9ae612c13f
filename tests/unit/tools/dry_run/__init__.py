"""Every family's own work on a rank, counted on pretended devices."""
