"""What a broker does with a store and a wire."""
