//! Generates a hello from a seed. It makes a legal hello, and then applies some changes as clients and attackers make them: to
//! the name, the extensions, the head, single bytes or the records, or by adding or removing bytes.

use crate::random::Random;

const SERVER_NAME: u16 = 0;
const ALPN: u16 = 16;

/// The parts of a ClientHello.
struct Draft {
    version: u16,
    session: Vec<u8>,
    suites: Vec<u8>,
    compression: Vec<u8>,
    extensions: Option<Vec<(u16, Vec<u8>)>>,
}

/// Returns the bytes that the client of this seed sends.
pub(crate) fn stream(seed: u64) -> Vec<u8> {
    let mut random = Random::new(seed);
    let random = &mut random;
    let mut draft = legal(random);
    if random.chance(25) {
        bend_extensions(random, &mut draft);
    }
    if random.chance(5) {
        bend_head(random, &mut draft);
    }
    let mut message = message(random, &draft);
    if random.chance(12) {
        for _ in 0..=random.below(3) {
            let at = random.below(message.len());
            message[at] = random.byte();
        }
    }
    let mut stream = records(random, &message);
    if random.chance(3) {
        let at = random.below(stream.len().min(12));
        stream[at] = random.byte();
    }
    match random.below(10) {
        0 => stream.truncate(random.below(stream.len() + 1)),
        1 => stream.extend(follower(random)),
        _ => {}
    }
    stream
}

// --- legal hellos ----------------------------------------------------------------------------------

fn legal(random: &mut Random) -> Draft {
    let mut extensions = vec![
        (43, list8(&[0x03, 0x04, 0x03, 0x03])),
        (10, list16(&[0x11, 0xec, 0x00, 0x1d, 0x00, 0x17])),
        (13, list16(&[0x04, 0x03, 0x08, 0x04, 0x04, 0x01])),
        (51, key_shares(random)),
    ];
    if random.chance(92) {
        let name = name(random);
        extensions.push((SERVER_NAME, server_names(&[(0, &name)])));
    }
    if random.chance(60) {
        extensions.push((ALPN, list16(&protocols(random).concat())));
    }
    let optional: [(u16, Vec<u8>); 14] = [
        (11, list8(&[0])),
        (22, Vec::new()),
        (23, Vec::new()),
        (35, random.bytes(32)),
        (5, vec![1, 0, 0, 0, 0]),
        (18, Vec::new()),
        (27, list8(&[0, 2])),
        (28, vec![0x40, 0x01]),
        (45, list8(&[1])),
        (0xff01, vec![0]),
        (0x0a0a, Vec::new()),
        (0x44cd, vec![0, 3, 2, b'h', b'2']),
        (0xfe0d, ech_outer(random)),
        (57, random.bytes(20)),
    ];
    for extension in optional {
        if random.chance(40) {
            extensions.push(extension);
        }
    }
    for _ in 0..random.below(3) {
        let kind = 0x1000 + u16::from(random.byte());
        let size = random.below(40);
        if extensions.iter().all(|(other, _)| *other != kind) {
            extensions.push((kind, random.bytes(size)));
        }
    }
    random.shuffle(&mut extensions);
    if random.chance(20) {
        // Padding (RFC 7685); now and then it brings the hello near or beyond the limit of 16 KiB.
        let size = if random.chance(20) { 13_500 + random.below(4000) } else { random.below(600) };
        extensions.push((21, vec![0; size]));
    }
    if random.chance(15) {
        extensions.push((41, pre_shared_key(random)));
    }
    let extensions = Some(extensions).filter(|_| !random.chance(1));
    let session_size = *random.pick(&[0, 32]);
    Draft {
        version: *random.pick(&[0x0303, 0x0303, 0x0303, 0x0301, 0x0304]),
        session: random.bytes(session_size),
        suites: [0x13, 0x01, 0x13, 0x02, 0xc0, 0x2f].repeat(1 + random.below(8)),
        compression: vec![0],
        extensions,
    }
}

fn key_shares(random: &mut Random) -> Vec<u8> {
    let mut shares = [vec![0x00, 0x1d], list16(&random.bytes(32))].concat();
    if random.chance(50) {
        let post_quantum = [vec![0x11, 0xec], list16(&random.bytes(1216))].concat();
        shares = [post_quantum, shares].concat();
    }
    list16(&shares)
}

fn ech_outer(random: &mut Random) -> Vec<u8> {
    [vec![0, 0, 1, 0, 1, 9], list16(&random.bytes(32)), list16(&random.bytes(144))].concat()
}

fn pre_shared_key(random: &mut Random) -> Vec<u8> {
    let identity = [list16(&random.bytes(90)), random.bytes(4)].concat();
    [list16(&identity), list16(&list8(&random.bytes(32)))].concat()
}

fn protocols(random: &mut Random) -> Vec<Vec<u8>> {
    const KNOWN: [&[u8]; 6] =
        [b"h2", b"http/1.1", b"istio", b"istio-peer-exchange", b"istio-h2", b"\x0a\x0a"];
    (0..=random.below(4)).map(|_| list8(KNOWN[random.below(KNOWN.len())])).collect()
}

/// Returns a host name that is mostly legal; now and then it is illegal, or an address.
fn name(random: &mut Random) -> Vec<u8> {
    match random.below(20) {
        0..8 => labels(random).join(&b'.'),
        8..10 => [&b"outbound_.443_.v1_."[..], &labels(random).join(&b'.')].concat(),
        10 => labels(random).join(&b'.').to_ascii_uppercase(),
        11 => [labels(random).join(&b'.'), b".".to_vec()].concat(),
        12 => {
            let mut labels = labels(random);
            let at = random.below(labels.len());
            let size = *random.pick(&[0, 1, 62, 63, 64]);
            labels[at] = vec![b'x'; size];
            labels.join(&b'.')
        }
        13 => {
            let size = *random.pick(&[251, 252, 253, 254, 255, 300, 5000]);
            let mut long: Vec<u8> = (0..size).map(|at| if at % 50 == 49 { b'.' } else { b'y' }).collect();
            long.pop();
            long.push(b'z');
            long
        }
        14 => {
            let literals: [&[u8]; 10] = [
                b"10.0.0.4",
                b"10.0.0.4.",
                b"2001:db8::1",
                b"::",
                b"::ffff:1.2.3.4",
                b"255.255.255.255",
                b"256.1.1.1",
                b"010.0.0.1",
                b"fe80::1%eth0",
                b"1.2.3",
            ];
            random.pick(&literals).to_vec()
        }
        15 => {
            let mut labels = labels(random);
            let at = random.below(labels.len());
            let edge: [&[u8]; 5] = [b"-a", b"a-", b"-", b"_", b"7"];
            labels[at] = random.pick(&edge).to_vec();
            labels.join(&b'.')
        }
        16 => [labels(random).join(&b'.'), b".42".to_vec()].concat(),
        17 => [labels(random).join(&b'.'), b"..".to_vec()].concat(),
        _ => {
            let mut name = labels(random).join(&b'.');
            let at = random.below(name.len());
            name[at] = *random.pick(&[0, 10, 27, b' ', b'*', b'/', b':', b'"', 0x80, 0xc3, 0xff, b'.']);
            name
        }
    }
}

fn labels(random: &mut Random) -> Vec<Vec<u8>> {
    const LETTERS: &[u8] = b"abcdefghijklmnopqrstuvwxyzABCXYZ0123456789_-";
    let mut label = |_| {
        let size = 1 + random.below(12);
        let mut label: Vec<u8> = (0..size).map(|_| *random.pick(LETTERS)).collect();
        label[0] = b'n';
        label[size - 1] = b'm';
        label
    };
    let count = 1 + label(0).len() % 5;
    (0..count).map(label).collect()
}

// --- what is done to them --------------------------------------------------------------------------

fn bend_extensions(random: &mut Random, draft: &mut Draft) {
    let Some(extensions) = &mut draft.extensions else { return };
    let at = random.below(extensions.len());
    match random.below(12) {
        0 => {
            let twin = extensions[at].clone();
            extensions.push(twin);
        }
        1 => {
            let kind = extensions[at].0;
            extensions.insert(0, (kind, random.bytes(4)));
        }
        2 => {
            extensions.remove(at);
        }
        3 => {
            let kept = random.below(extensions[at].1.len() + 1);
            extensions[at].1.truncate(kept);
        }
        4 => {
            let more = 1 + random.below(4);
            let more = random.bytes(more);
            extensions[at].1.extend(more);
        }
        5 => random.shuffle(extensions),
        6 | 7 => replace(extensions, ALPN, bent_protocols(random)),
        _ => replace(extensions, SERVER_NAME, bent_names(random)),
    }
}

fn replace(extensions: &mut Vec<(u16, Vec<u8>)>, kind: u16, body: Vec<u8>) {
    match extensions.iter_mut().find(|(other, _)| *other == kind) {
        Some((_, old)) => *old = body,
        None => extensions.insert(0, (kind, body)),
    }
}

fn bent_names(random: &mut Random) -> Vec<u8> {
    let (one, other) = (name(random), name(random));
    let good = server_names(&[(0, &one)]);
    match random.below(12) {
        0 => Vec::new(),
        1 => vec![0],
        2 => list16(&[]),
        3 => server_names(&[(0, b"")]),
        4 => server_names(&[(0, &one), (0, &other)]),
        5 => server_names(&[(1, &one)]),
        6 => server_names(&[(1, &one), (0, &other)]),
        7 => server_names(&[(0, &one), (*random.pick(&[1, 2, 255]), &other)]),
        8 => good[..random.below(good.len())].to_vec(),
        9 => [good, random.bytes(2)].concat(),
        10 => {
            let mut bent = good;
            let at = random.below(bent.len().min(5));
            bent[at] = bent[at].wrapping_add(*random.pick(&[1, 2, 255]));
            bent
        }
        _ => {
            let mut bent = server_names(&[(0, &one), (0, &[])]);
            bent.truncate(bent.len() - random.below(4));
            bent
        }
    }
}

fn bent_protocols(random: &mut Random) -> Vec<u8> {
    let good = list16(&protocols(random).concat());
    match random.below(7) {
        0 => Vec::new(),
        1 => list16(&[]),
        2 => list16(&[2, b'h', b'2', 0]),
        3 => list16(&[9, b'h', b'2']),
        4 => good[..random.below(good.len())].to_vec(),
        5 => [good, random.bytes(1)].concat(),
        _ => {
            let mut bent = good;
            let at = random.below(bent.len());
            bent[at] = random.byte();
            bent
        }
    }
}

fn bend_head(random: &mut Random, draft: &mut Draft) {
    match random.below(6) {
        0 => {
            let size = random.below(60);
            draft.session = random.bytes(size);
        }
        1 => draft.suites.clear(),
        2 => draft.suites.push(0x13),
        3 => draft.compression.clear(),
        4 => draft.compression = vec![1],
        _ => draft.version = 0x0505,
    }
}

// --- bytes -----------------------------------------------------------------------------------------

fn message(random: &mut Random, draft: &Draft) -> Vec<u8> {
    let mut body = draft.version.to_be_bytes().to_vec();
    body.extend(random.bytes(32));
    body.extend(list8(&draft.session));
    body.extend(list16(&draft.suites));
    body.extend(list8(&draft.compression));
    if let Some(extensions) = &draft.extensions {
        let block: Vec<u8> = extensions
            .iter()
            .flat_map(|(kind, body)| [kind.to_be_bytes().to_vec(), list16(body)].concat())
            .collect();
        body.extend(list16(&block));
    }
    match random.below(100) {
        // Adds bytes after the extension block, changes one byte, or cuts the body off, so that an inner length may be wrong.
        0 => body.extend(random.bytes(2)),
        1 => {
            let at = random.below(body.len());
            body[at] = body[at].wrapping_add(1);
        }
        2 => body.truncate(random.below(body.len())),
        _ => {}
    }
    handshake(if random.chance(99) { 1 } else { *random.pick(&[0, 2, 4, 11, 16, 20]) }, &body)
}

fn records(random: &mut Random, message: &[u8]) -> Vec<u8> {
    let mut sizes = Vec::new();
    match random.below(10) {
        0..5 => {}
        5 => sizes.push(random.below(message.len())),
        6 => sizes = vec![*random.pick(&[1, 2, 3, 4, 5, 16]); random.below(90)],
        7 => sizes = (0..random.below(12)).map(|_| 1 + random.below(400)).collect(),
        8 => sizes = vec![message.len() / 63 + 1; *random.pick(&[62, 63, 64, 70])],
        _ => sizes = vec![1 + random.below(40), 1 + random.below(40)],
    }
    let (mut stream, mut rest) = (Vec::new(), message);
    let mut sizes = sizes.into_iter();
    while !rest.is_empty() {
        let size = sizes.next().unwrap_or(rest.len()).min(rest.len()).min(16_384);
        let (fragment, behind) = rest.split_at(size);
        if size > 0 || random.chance(20) {
            stream.extend(record(22, *random.pick(&[1, 1, 3, 0, 4]), fragment));
        }
        rest = behind;
        if random.chance(1) && !rest.is_empty() {
            let kind = *random.pick(&[20, 21, 23, 24, 22]);
            let size = random.below(3);
            stream.extend(record(kind, 3, &random.bytes(size)));
        }
    }
    if random.chance(1) {
        // A record of about the largest legal size, filled by one legal hello.
        let size = *random.pick(&[16_384, 16_385, 17_000, 18_431, 18_432]);
        stream = record(22, 1, &padded_to(size));
    }
    if random.chance(3) {
        let extra = handshake(*random.pick(&[1, 20]), &random.bytes(12));
        let size = u16::from_be_bytes([stream[3], stream[4]]);
        if stream.len() == 5 + usize::from(size) && size < 16_000 {
            let size = size + u16::try_from(extra.len()).expect("short");
            stream[3..5].copy_from_slice(&size.to_be_bytes());
            stream.extend(extra);
        }
    }
    stream
}

/// Returns a legal hello whose handshake message has this size in bytes.
fn padded_to(size: usize) -> Vec<u8> {
    let head = [&[3, 3][..], &[7; 32], &[0, 0, 2, 0x13, 0x01, 1, 0]].concat();
    let signatures = [0, 13, 0, 4, 0, 2, 4, 3];
    let rest = size - 4 - head.len() - 2 - signatures.len() - 4;
    let block = [&signatures[..], &[0, 21], &list16(&vec![0; rest])].concat();
    handshake(1, &[head, list16(&block)].concat())
}

fn follower(random: &mut Random) -> Vec<u8> {
    match random.below(4) {
        0 => record(20, 3, &[1]),
        1 => {
            let size = 1 + random.below(300);
            record(23, 3, &random.bytes(size))
        }
        2 => record(22, 3, &handshake(20, &random.bytes(32))),
        _ => {
            let size = random.below(300);
            random.bytes(size)
        }
    }
}

pub(crate) fn record(kind: u8, minor: u8, fragment: &[u8]) -> Vec<u8> {
    [vec![kind, 3, minor], list16(fragment)].concat()
}

pub(crate) fn handshake(kind: u8, body: &[u8]) -> Vec<u8> {
    let length = u32::try_from(body.len()).expect("short").to_be_bytes();
    [&[kind], &length[1..], body].concat()
}

pub(crate) fn list16(body: &[u8]) -> Vec<u8> {
    [&u16::try_from(body.len()).expect("short").to_be_bytes(), body].concat()
}

fn list8(body: &[u8]) -> Vec<u8> {
    [&[u8::try_from(body.len()).expect("short")], body].concat()
}

fn server_names(names: &[(u8, &[u8])]) -> Vec<u8> {
    let entries: Vec<Vec<u8>> =
        names.iter().map(|(kind, name)| [vec![*kind], list16(name)].concat()).collect();
    list16(&entries.concat())
}
