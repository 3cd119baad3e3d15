"""The accuracy laboratory: any cache-quantization method inside a Hugging Face model, side by side."""
