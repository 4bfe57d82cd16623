// Reads refusals and streams with the clients and decoders of Go.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"

	"github.com/anthropics/anthropic-sdk-go"
	anthropicoption "github.com/anthropics/anthropic-sdk-go/option"
	openaiv1 "github.com/openai/openai-go"
	optionv1 "github.com/openai/openai-go/option"
	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"
	"github.com/openai/openai-go/v3/responses"
)

const (
	largeBytes   = 5_000_000
	refusals     = 20
	answerTokens = 16
)

var (
	url   = os.Getenv("CLIENTS_URL")
	model = os.Getenv("CLIENTS_MODEL")
	cases = map[string]func(name string) error{
		"net-http-refused":    refuse,
		"openai-v1-chat":      readV1,
		"openai-v3-chat":      readV3,
		"openai-v3-responses": readResponses,
		"anthropic-messages":  readAnthropic,
	}
)

// A stream of one of the libraries.
type stream[Event any] interface {
	Next() bool
	Current() Event
	Err() error
}

// Returns a prompt that no other case has, so that it is computed anew.
func prompt(name string) string {
	return name + " of Go: " + strings.Repeat("say hello to the ship. ", 120)
}

// Reads a stream to its end, which must have events with text.
func read[Event any](events stream[Event], text func(Event) string) error {
	count, texts := 0, ""
	for events.Next() {
		count++
		texts += text(events.Current())
	}
	if events.Err() == nil && (count < 2 || texts == "") {
		return fmt.Errorf("%d events with the text %q", count, texts)
	}
	return events.Err()
}

func refuse(string) error {
	large := bytes.Repeat([]byte("x"), largeBytes)
	for range refusals {
		answer, err := http.Post(url+"/no/such/route", "text/plain", bytes.NewReader(large))
		if err != nil {
			return err
		}
		body, err := io.ReadAll(answer.Body)
		answer.Body.Close()
		if err != nil || answer.StatusCode != 404 || !json.Valid(body) {
			return fmt.Errorf("%d %s: %w", answer.StatusCode, body, err)
		}
	}
	return nil
}

func readV1(name string) error {
	client := openaiv1.NewClient(
		optionv1.WithBaseURL(url+"/v1"), optionv1.WithAPIKey("a key"), optionv1.WithMaxRetries(0))
	events := client.Chat.Completions.NewStreaming(
		context.Background(), openaiv1.ChatCompletionNewParams{
			Model:     model,
			Messages:  []openaiv1.ChatCompletionMessageParamUnion{openaiv1.UserMessage(prompt(name))},
			MaxTokens: openaiv1.Int(answerTokens),
		})
	return read(events, func(chunk openaiv1.ChatCompletionChunk) string {
		if len(chunk.Choices) == 0 {
			return ""
		}
		return chunk.Choices[0].Delta.Content
	})
}

func v3() openai.Client {
	return openai.NewClient(
		option.WithBaseURL(url+"/v1"), option.WithAPIKey("a key"), option.WithMaxRetries(0))
}

func readV3(name string) error {
	client := v3()
	events := client.Chat.Completions.NewStreaming(
		context.Background(), openai.ChatCompletionNewParams{
			Model:     model,
			Messages:  []openai.ChatCompletionMessageParamUnion{openai.UserMessage(prompt(name))},
			MaxTokens: openai.Int(answerTokens),
		})
	return read(events, func(chunk openai.ChatCompletionChunk) string {
		if len(chunk.Choices) == 0 {
			return ""
		}
		return chunk.Choices[0].Delta.Content
	})
}

func readResponses(name string) error {
	client := v3()
	events := client.Responses.NewStreaming(context.Background(), responses.ResponseNewParams{
		Model:           model,
		Input:           responses.ResponseNewParamsInputUnion{OfString: openai.String(prompt(name))},
		MaxOutputTokens: openai.Int(answerTokens),
	})
	return read(events, func(event responses.ResponseStreamEventUnion) string { return event.Type })
}

func readAnthropic(name string) error {
	client := anthropic.NewClient(
		anthropicoption.WithBaseURL(url), anthropicoption.WithAPIKey("a key"),
		anthropicoption.WithMaxRetries(0))
	message := anthropic.NewUserMessage(anthropic.NewTextBlock(prompt(name)))
	events := client.Messages.NewStreaming(context.Background(), anthropic.MessageNewParams{
		Model: anthropic.Model(model), MaxTokens: answerTokens,
		Messages: []anthropic.MessageParam{message},
	})
	return read(events, func(event anthropic.MessageStreamEventUnion) string {
		return event.Delta.Text
	})
}

func main() {
	chosen, err := os.ReadFile(os.Getenv("CLIENTS_CASES"))
	if err != nil {
		panic(err)
	}
	report, err := os.Create(os.Getenv("CLIENTS_REPORT"))
	if err != nil {
		panic(err)
	}
	for _, name := range strings.Fields(string(chosen)) {
		outcome := map[string]any{"case": name, "error": nil}
		if err := cases[name](name); err != nil {
			outcome["error"] = err.Error()
		}
		if err := json.NewEncoder(report).Encode(outcome); err != nil {
			panic(err)
		}
	}
}
