"""What happens to a full bucket: from this rank's gradients to the average."""
