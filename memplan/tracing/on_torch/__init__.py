"""What imports torch."""
