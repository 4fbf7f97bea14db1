//! Tests of reading and writing headers, with fixed and with random input.

use proptest::prelude::*;

use super::read::{Header, HeaderFault, Verdict, crc32c, read};
use super::write::{local, v1, v2};
use super::*;
use isthmus_model::endpoint::ProxyVersion;

fn announced(source: &str, destination: &str) -> Announced {
    let address = |text: &str| text.parse().expect("an address");
    Announced { source: address(source), destination: address(destination) }
}

fn proxied(source: &str, destination: &str) -> Header {
    Header::Proxied(announced(source, destination))
}

/// Reads the bytes at once and cut after each byte; asserts that the verdicts agree.
#[track_caller]
fn judged(bytes: &[u8]) -> Verdict {
    let whole = read(bytes);
    for end in 0..bytes.len() {
        match (read(&bytes[..end]), whole) {
            (Verdict::NeedMore, _) => {}
            (cut, whole) => assert_eq!(cut, whole, "after {end} bytes of {}", bytes.escape_ascii()),
        }
    }
    whole
}

#[track_caller]
fn malformed(bytes: &[u8], part: &str) {
    match judged(bytes) {
        Verdict::Refused(HeaderFault::Malformed(what)) => assert!(what.contains(part), "{what:?}"),
        other => panic!("{}: {other:?}", bytes.escape_ascii()),
    }
}

/// Returns a header of version 2 with these bytes after its addresses.
fn with_tlvs(tlvs: &[u8]) -> Vec<u8> {
    let length = u16::try_from(12 + tlvs.len()).expect("short").to_be_bytes();
    let addresses = [192, 0, 2, 1, 192, 0, 2, 2, 0x04, 0xd2, 0x01, 0xbb];
    [V2_SIGNATURE, &[PROXY, TCP4][..], &length, &addresses, tlvs].concat()
}

#[test]
fn a_line_is_a_header_of_version_1() {
    let whole = |line: &str, header| {
        let length = line.len();
        let stream = [line.as_bytes(), &[22, 3, 1, b'\n'][..]].concat();
        assert_eq!(judged(&stream), Verdict::Whole { header, length }, "{line:?}");
    };
    whole("PROXY TCP4 192.0.2.1 192.0.2.2 1234 443\r\n", proxied("192.0.2.1:1234", "192.0.2.2:443"));
    whole(
        "PROXY TCP6 2001:db8::1 2001:db8::2 65535 0\r\n",
        proxied("[2001:db8::1]:65535", "[2001:db8::2]:0"),
    );
    whole("PROXY TCP6 ::ffff:192.0.2.1 ::1 1 2\r\n", proxied("192.0.2.1:1", "[::1]:2"));
    whole("PROXY UNKNOWN\r\n", Header::Local);
    whole("PROXY UNKNOWN ffff::1 anything at all\r\n", Header::Local);
    // The longest possible line.
    let six = "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff";
    let longest = format!("PROXY UNKNOWN {six} {six} 65535 65535\r\n");
    assert_eq!(longest.len(), V1_BYTES_MAX);
    whole(&longest, Header::Local);
}

#[test]
fn a_line_that_is_not_exactly_a_header_is_refused() {
    for (line, part) in [
        ("PROXY TCP4 192.0.2.1 192.0.2.2 1234 443\n", "does not end with CR LF"),
        ("PROXY \r\n", "none of TCP4"),
        ("PROXY UDP4 192.0.2.1 192.0.2.2 1 2\r\n", "none of TCP4"),
        ("PROXY UNKNOWNS\r\n", "none of TCP4"),
        ("PROXY tcp4 192.0.2.1 192.0.2.2 1 2\r\n", "none of TCP4"),
        ("PROXY TCP4  192.0.2.1 192.0.2.2 1 2\r\n", "not an IPv4"),
        ("PROXY TCP4 192.0.2.1\r\n", "not an IPv4"),
        ("PROXY TCP4 192.0.2.01 192.0.2.2 1 2\r\n", "not an IPv4"),
        ("PROXY TCP4 ::1 192.0.2.2 1 2\r\n", "not an IPv4"),
        ("PROXY TCP6 192.0.2.1 ::1 1 2\r\n", "not an IPv6"),
        ("PROXY TCP6 fe80::1%eth0 ::1 1 2\r\n", "not an IPv6"),
        ("PROXY TCP4 192.0.2.1 192.0.2.2 1\r\n", "a port"),
        ("PROXY TCP4 192.0.2.1 192.0.2.2 65536 2\r\n", "a port"),
        ("PROXY TCP4 192.0.2.1 192.0.2.2 +1 2\r\n", "a port"),
        ("PROXY TCP4 192.0.2.1 192.0.2.2 01 2\r\n", "a port"),
        ("PROXY TCP4 192.0.2.1 192.0.2.2 -1 2\r\n", "a port"),
        ("PROXY TCP4 192.0.2.1 192.0.2.2 1 2 \r\n", "continues after the ports"),
        ("PROXY TCP4 192.0.2.1 192.0.2.2 1 2 3\r\n", "continues after the ports"),
        ("PROXY UNKNOWN \u{e9}\r\n\r\n", ""),
    ] {
        if part.is_empty() {
            assert!(matches!(judged(line.as_bytes()), Verdict::Whole { header: Header::Local, .. }));
        } else {
            malformed(line.as_bytes(), part);
        }
    }
    malformed(b"PROXY TCP4 \xff\r\n", "not UTF-8 text");
    let endless = [V1_PREFIX, &[b'1'; 200]].concat();
    assert_eq!(judged(&endless), Verdict::Refused(HeaderFault::TooLong(V1_BYTES_MAX)));
    let late = [V1_PREFIX, b"UNKNOWN ", &[b'1'; 92], b"\r\n"].concat();
    assert_eq!(judged(&late), Verdict::Refused(HeaderFault::TooLong(V1_BYTES_MAX)), "{} bytes", late.len());
}

#[test]
fn bytes_that_begin_no_header_are_recognised_at_once() {
    for bytes in
        [&b"\x16\x03\x01\x02\x00"[..], b"GET / HTTP/1.1\r\n", b"PROXz", b"\r\n\r\n\0\r\nQUIT\r", b"\0"]
    {
        assert_eq!(judged(bytes), Verdict::Refused(HeaderFault::Missing), "{}", bytes.escape_ascii());
    }
    assert_eq!(read(b""), Verdict::NeedMore);
}

#[test]
fn a_binary_header_is_one_of_version_2() {
    let of_four = proxied("192.0.2.1:1234", "192.0.2.2:443");
    assert_eq!(judged(&with_tlvs(&[])), Verdict::Whole { header: of_four, length: 28 });
    let with_noop = with_tlvs(&[4, 0, 2, 0, 0, 0xea, 0, 0]);
    assert_eq!(judged(&[&with_noop[..], &[22, 3]].concat()), Verdict::Whole { header: of_four, length: 36 });
    let six = announced("[2001:db8::1]:1", "[2001:db8::2]:2");
    let written = v2(&six, None, "");
    assert_eq!(judged(&written), Verdict::Whole { header: Header::Proxied(six), length: 16 + 36 + 3 });
    // LOCAL with any other content, and PROXY with an unspecified family.
    for (command, family, rest) in [(LOCAL, 0, 0_u16), (LOCAL, TCP4, 5), (LOCAL, 0xff, 300), (PROXY, 0, 40)] {
        let bytes =
            [V2_SIGNATURE, &[command, family][..], &rest.to_be_bytes(), &vec![9; rest.into()]].concat();
        let length = bytes.len();
        assert_eq!(judged(&bytes), Verdict::Whole { header: Header::Local, length }, "{family:#x}");
    }
}

#[test]
fn a_binary_header_that_contradicts_itself_is_refused() {
    let fixed = |command: u8, family: u8, length: u16| {
        [V2_SIGNATURE, &[command, family][..], &length.to_be_bytes(), &[1; 40]].concat()
    };
    for command in [0x10, 0x11, 0x22, 0x2f, 0x31, 0x00] {
        malformed(&fixed(command, TCP4, 12), "version");
    }
    // UDP and unix sockets are not accepted.
    for family in [0x12, 0x22, 0x31, 0x32, 0x10, 0x01, 0x41] {
        malformed(&fixed(PROXY, family, 40), "neither TCP over IPv4");
    }
    malformed(&fixed(PROXY, TCP4, 11), "too short");
    malformed(&fixed(PROXY, TCP6, 35), "too short");
    let too_long = fixed(PROXY, TCP4, u16::MAX);
    assert_eq!(judged(&too_long), Verdict::Refused(HeaderFault::TooLong(V2_BYTES_MAX)));
    assert_eq!(judged(&fixed(LOCAL, 0, 4081)), Verdict::Refused(HeaderFault::TooLong(V2_BYTES_MAX)));
    assert_eq!(judged(&fixed(LOCAL, 0, 4080)), Verdict::NeedMore);
    for (tlvs, part) in [
        (&[2][..], "within the type or length"),
        (&[2, 0], "within the type or length"),
        (&[2, 0, 1], "extends beyond the end"),
        (&[2, 0xff, 0xff, 1, 2, 3], "extends beyond the end"),
        (&[4, 0, 0, 5, 0], "within the type or length"),
        (&[3, 0, 0], "checksum does not have 4 bytes"),
        (&[3, 0, 5, 1, 2, 3, 4, 5], "checksum does not have 4 bytes"),
        (&[3, 0, 4, 1, 2, 3, 4], "checksum does not match"),
        (&[3, 0, 4, 1, 2, 3, 4, 3, 0, 4, 1, 2, 3, 4], "twice"),
    ] {
        malformed(&with_tlvs(tlvs), part);
    }
}

#[test]
fn a_checksum_is_verified_wherever_it_is() {
    assert_eq!(!crc32c(u32::MAX, b"123456789"), 0xe306_9283, "the check value of CRC-32C");
    for (before, after) in [(&[][..], &[][..]), (&[2, 0, 1, b'a'], &[5, 0, 2, 1, 2])] {
        let mut header = with_tlvs(&[before, &[3, 0, 4, 0, 0, 0, 0], after].concat());
        let at = 28 + before.len() + 3;
        let checksum = (!crc32c(u32::MAX, &header)).to_be_bytes();
        header[at..at + 4].copy_from_slice(&checksum);
        assert!(matches!(judged(&header), Verdict::Whole { .. }));
        // The type of the checksum's TLV stays: with another type, the header would be one without a checksum.
        for position in (16..header.len()).filter(|position| *position != at - 3) {
            let mut other = header.clone();
            other[position] ^= 1;
            assert!(!matches!(read(&other), Verdict::Whole { .. }), "byte {position} has changed");
        }
    }
}

#[test]
fn headers_are_written_as_the_specification_says() {
    let four = announced("192.0.2.1:1234", "192.0.2.2:443");
    assert_eq!(v1(&four), b"PROXY TCP4 192.0.2.1 192.0.2.2 1234 443\r\n");
    let mixed = announced("192.0.2.1:1", "[2001:db8::2]:2");
    assert_eq!(v1(&mixed), b"PROXY TCP6 ::ffff:192.0.2.1 2001:db8::2 1 2\r\n");
    let tlvs = [&[2, 0, 6][..], b"a.test", &[5, 0, 2], b"7f"].concat();
    assert_eq!(v2(&four, Some("a.test"), "7f"), with_tlvs(&tlvs));
    assert_eq!(v2(&mixed, None, "7f")[13], TCP6);
    for version in ProxyVersion::ALL {
        let header = local(version);
        assert_eq!(judged(header), Verdict::Whole { header: Header::Local, length: header.len() });
    }
}

fn any_address() -> impl Strategy<Value = SocketAddr> {
    (any::<std::net::IpAddr>(), any::<u16>())
        .prop_map(|(ip, port)| SocketAddr::new(isthmus_model::address::canonical_ip(ip), port))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn what_is_written_is_read(source in any_address(), destination in any_address(), name in "[a-z.]{0,253}", rest in any::<[u8; 3]>()) {
        let announced = Announced { source, destination };
        for header in [v1(&announced), v2(&announced, Some(&name), "7f")] {
            let length = header.len();
            let stream = [&header[..], &rest].concat();
            prop_assert_eq!(judged(&stream), Verdict::Whole { header: Header::Proxied(announced), length });
        }
    }

    #[test]
    fn any_bytes_get_the_same_verdict_however_they_are_cut(
        begin in 0..4_usize, fixed in any::<[u8; 4]>(), short in any::<bool>(), bytes in prop::collection::vec(any::<u8>(), 0..300),
    ) {
        let begin: &[u8] = [&b""[..], V1_PREFIX, b"PROXY TCP4 1.2.3.4 ", V2_SIGNATURE][begin];
        let [command, family, high, low] = fixed;
        let fixed = if begin == V2_SIGNATURE && short { vec![PROXY, TCP4 + (family & 0x10), 0, low] } else { vec![command, family, high, low] };
        judged(&[begin, &fixed, &bytes].concat());
    }

    #[test]
    fn a_changed_header_is_judged_without_harm(announced in (any_address(), any_address()), at in any::<prop::sample::Index>(), to in any::<u8>()) {
        let announced = Announced { source: announced.0, destination: announced.1 };
        for mut header in [v1(&announced), v2(&announced, Some("a.test"), "7f")] {
            let at = at.index(header.len());
            header[at] = to;
            judged(&header);
        }
    }
}
