//! Tests of proofs: what counts, and that nothing else does.

use contract::{control, envelope::ENVELOPE};

use super::{
    agent::AgentProofs,
    announcement,
    router::{Hello, Signer},
    *,
};
use crate::{reload::Reloaded, router_token::Tokens};

fn tokens(letters: &str) -> Reloaded<Tokens> {
    let lines: Vec<String> = letters.chars().map(|letter| letter.to_string().repeat(32)).collect();
    Reloaded::fixed(Tokens::parse("tokens", lines.join("\n").as_bytes()).unwrap())
}

fn agent(id: &str, letters: &str) -> AgentProofs {
    AgentProofs::new(id.to_owned(), tokens(letters))
}

/// Returns a signer to which the agent has proven itself.
fn signer(agent: &AgentProofs, letters: &str) -> Signer {
    let signer = Signer::new(tokens(letters));
    let hello = signer.hello();
    signer.accept(&hello, agent.answer(&hello.message()).unwrap()).unwrap();
    signer
}

/// A request, as it was signed.
#[derive(Clone)]
struct Signed(Method, Uri, HeaderMap);

fn sign(signer: &Signer) -> Signed {
    let (method, uri) = (Method::POST, Uri::from_static("http://a:1/generate?x=1"));
    let mut headers = HeaderMap::new();
    headers.insert(ENVELOPE, HeaderValue::from_static("{\"principal\": \"p\"}"));
    headers.insert("user-agent", HeaderValue::from_static("anything"));
    signer.sign(&method, &uri, &mut headers);
    Signed(method, uri, headers)
}

fn check(agent: &AgentProofs, Signed(method, uri, headers): &Signed) -> Result<(), Error> {
    agent.check(method, uri, headers)
}

#[test]
fn a_signed_request_counts_once_and_only_at_its_agent() {
    let (agent, other) = (agent("a", "x"), agent("b", "x"));
    let signer = signer(&agent, "x");
    let (first, second) = (sign(&signer), sign(&signer));
    assert_eq!(check(&agent, &second), Ok(()));
    assert_eq!(check(&agent, &first), Ok(()));
    assert_eq!(check(&agent, &first), Err(Error::Replayed));
    assert_eq!(check(&other, &sign(&signer)), Err(Error::Forged));
    let again = self::agent("a", "x");
    assert_eq!(check(&again, &sign(&signer)), Err(Error::Outdated), "of an earlier process");
}

#[test]
fn nothing_that_is_signed_can_be_changed() {
    let agent = agent("a", "x");
    let signed = sign(&signer(&agent, "x"));
    let changes: [fn(&mut Signed); 7] = [
        |Signed(method, ..)| *method = Method::GET,
        |Signed(_, uri, _)| *uri = Uri::from_static("/generate?x=2"),
        |Signed(.., headers)| drop(headers.remove(ENVELOPE)),
        |Signed(.., headers)| {
            headers.append(ENVELOPE, HeaderValue::from_static("{}"));
        },
        |Signed(.., headers)| {
            drop(headers.insert(ENVELOPE, HeaderValue::from_static("{\"principal\": \"q\"}")));
        },
        |Signed(.., headers)| {
            drop(headers.insert(control::ADMIN, HeaderValue::from_static("1")));
        },
        |Signed(.., headers)| {
            let mut proof = RequestProof::from_header(&headers[proof::REQUEST]).unwrap();
            proof.stamp.number += 1;
            headers.insert(proof::REQUEST, proof.to_header());
        },
    ];
    for (number, change) in changes.iter().enumerate() {
        let mut changed = signed.clone();
        change(&mut changed);
        assert_eq!(check(&agent, &changed), Err(Error::Forged), "change {number}");
    }
    for bad in ["", "?", "AAAA", &"A".repeat(2000)] {
        let mut changed = signed.clone();
        changed.2.insert(proof::REQUEST, HeaderValue::from_str(bad).unwrap());
        assert_eq!(check(&agent, &changed), Err(Error::Malformed), "{bad}");
    }
    let mut bare = signed.clone();
    bare.2.remove(proof::REQUEST);
    assert_eq!(check(&agent, &bare), Err(Error::Missing));
    // What is not signed may be changed on the way, and the address may be another one.
    let mut passed = signed;
    passed.2.remove("user-agent");
    passed.1 = Uri::from_static("/generate?x=1");
    assert_eq!(check(&agent, &passed), Ok(()));
}

#[test]
fn an_agent_without_the_token_proves_nothing_and_learns_nothing() {
    let (agent, liar) = (agent("a", "x"), agent("a", "y"));
    let signer = Signer::new(tokens("x"));
    let hello = signer.hello();
    assert_eq!(liar.answer(&hello.message()), Err(Error::OtherToken));
    let honest = agent.answer(&hello.message()).unwrap();
    // The answer to another hello, and an answer under another name.
    assert_eq!(signer.accept(&signer.hello(), honest.clone()), Err(Error::Forged));
    let renamed = contract::v1::ProveResponse { agent_id: "b".to_owned(), ..honest.clone() };
    assert_eq!(signer.accept(&hello, renamed), Err(Error::Forged));
    assert!(!sign(&signer).2.contains_key(proof::REQUEST), "it signs for a stranger");
    signer.accept(&hello, honest).unwrap();
    let shown = format!("{hello:?} {:?} {signer:?} {:?}", hello.message(), sign(&signer).2);
    assert!(!shown.contains(&"x".repeat(32)));
}

#[test]
fn a_new_process_of_the_agent_proves_itself_on_the_data_port() {
    let (agent, again, other) = (agent("a", "x"), agent("a", "x"), agent("b", "x"));
    let signer = signer(&agent, "x");
    let answer = |agent: &AgentProofs, hello: &Hello| {
        let mut headers = HeaderMap::new();
        headers.insert(proof::HELLO, hello.to_header());
        let answer = agent.answer_headers(&headers).unwrap();
        HeaderMap::from_iter([(proof::AGENT, answer)])
    };
    let hello = signer.hello();
    assert_eq!(signer.accept_again(&hello, &answer(&other, &hello)), Err(Error::Forged));
    assert_eq!(signer.accept_again(&hello, &HeaderMap::new()), Err(Error::Missing));
    assert_eq!(check(&agent, &sign(&signer)), Ok(()));
    signer.accept_again(&hello, &answer(&again, &hello)).unwrap();
    assert_eq!(check(&again, &sign(&signer)), Ok(()));
    assert_eq!(check(&agent, &sign(&signer)), Err(Error::Outdated));
    assert_eq!(again.answer_headers(&HeaderMap::new()), Err(Error::Missing));
}

#[test]
fn tokens_rotate_in_three_steps() {
    for (agent_tokens, router_tokens) in [("xy", "x"), ("xy", "y"), ("yx", "y"), ("y", "yx")] {
        let agent = agent("a", agent_tokens);
        let signed = sign(&signer(&agent, router_tokens));
        assert_eq!(check(&agent, &signed), Ok(()), "{agent_tokens} {router_tokens}");
    }
}

#[test]
fn an_announcement_counts_for_its_id_and_address_only() {
    let (known, first) = (tokens("yx").load(), tokens("x").load());
    let (id, control) = ("a", "http://a:1");
    let headers = |value| HeaderMap::from_iter([(proof::AGENT, value)]);
    let signed = headers(announcement::sign(&first, id, control));
    assert_eq!(announcement::check(&known, id, control, &signed), Ok(()));
    assert_eq!(announcement::check(&known, "b", control, &signed), Err(Error::Forged));
    assert_eq!(announcement::check(&known, id, "http://b:1", &signed), Err(Error::Forged));
    assert_eq!(announcement::check(&known, id, control, &HeaderMap::new()), Err(Error::Missing));
    let stranger = announcement::sign(&tokens("z").load(), id, control);
    assert_eq!(
        announcement::check(&known, id, control, &headers(stranger)),
        Err(Error::OtherToken)
    );
    // The proof of an answer to a hello is none of an announcement, and the other way round.
    let (agent, hello) = (agent("a", "x"), Hello::new(first));
    let answer = agent.answer(&hello.message()).unwrap();
    let as_announced = encode(&[&hello.message().token_id[..], &answer.mac].concat());
    let refused = announcement::check(&known, id, control, &headers(as_announced));
    assert_eq!(refused, Err(Error::Forged));
}
