"""What carries out schedules of messages between ranks."""
