"""Tells which kind of key a certificate is for, and whether gRPC's TLS library (BoringSSL) can use it."""

from __future__ import annotations

from typing import Final

_RSA: Final = bytes.fromhex("2a864886f70d010101")  # RFC 8017, rsaEncryption
_EC: Final = bytes.fromhex("2a8648ce3d0201")  # RFC 5480, id-ecPublicKey
_CURVES: Final = (bytes.fromhex("2a8648ce3d030107"), bytes.fromhex("2b81040022"))
"""P-256 and P-384. BoringSSL knows P-521 and refuses it in handshakes."""
_NAMES: Final = {
    bytes.fromhex("2b81040021"): "EC P-224",
    bytes.fromhex("2b81040023"): "EC P-521",
    bytes.fromhex("2b8104000a"): "EC secp256k1",
    bytes.fromhex("2a864886f70d01010a"): "RSA-PSS",  # a key for PSS only; that a CA signs with PSS is no matter
    bytes.fromhex("2b6570"): "Ed25519",
    bytes.fromhex("2b6571"): "Ed448",
    bytes.fromhex("2a8648ce380401"): "DSA",
}
_OID, _VERSION = 0x06, 0xA0  # tags of DER


def kind_not_in_grpc(certificate: bytes) -> str:
    """Return the kind of a certificate's key, if a handshake of gRPC cannot use it.

    Args:
        certificate: DER (RFC 5280).

    Returns:
        A name, empty for a key that gRPC uses.

    Raises:
        ValueError: it is not a certificate.
    """
    fields = _parts(_parts(_parts(certificate)[0][1])[0][1])  # the tbsCertificate's
    begin = 1 if fields[0][0] == _VERSION else 0  # absent for version 1
    # serialNumber, signature, issuer, validity, subject, subjectPublicKeyInfo
    (_, algorithm), *parameters = _parts(_parts(fields[begin + 5][1])[0][1])
    if algorithm == _RSA:
        return ""
    if algorithm != _EC:
        return _name(algorithm)
    if not parameters or parameters[0][0] != _OID:
        return "EC with parameters of its own in place of a named curve"
    curve = parameters[0][1]
    return "" if curve in _CURVES else _name(curve)


def _name(oid: bytes) -> str:
    return _NAMES.get(oid, f"with the object identifier {oid.hex()}")


def _parts(data: bytes) -> list[tuple[int, bytes]]:
    """Yield what stands in a row in DER: tags and contents."""
    parts = []
    while data:
        header = 2
        if len(data) < header:
            raise ValueError("DER ends early")
        nbytes = data[1]
        if nbytes & 0x80:  # the length of the length
            header += nbytes & 0x7F
            nbytes = int.from_bytes(data[2:header], "big")
        if len(data) < header + nbytes:
            raise ValueError("DER ends early")
        parts.append((data[0], data[header : header + nbytes]))
        data = data[header + nbytes :]
    if not parts:
        raise ValueError("DER ends early")
    return parts
